"""The store's server: its process and launcher, its Unix socket and the trainers' client, its service for peers."""
