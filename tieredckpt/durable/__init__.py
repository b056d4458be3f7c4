"""The durable tier: objects below a URL, on S3, other clouds, or a file system."""
