"""Server of the store: process, launcher, Unix socket, trainers' client, and service for peers."""
