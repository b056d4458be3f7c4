"""The embedded control plane's shared parts: its interface, messages, clients and child processes."""
