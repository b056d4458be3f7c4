"""The on-disk format of docs/reference/format.md: shard layout, manifest, slices, object keys. No torch."""
