"""The on-disk format of docs/format.md: shard layout, manifest, slices, object keys. No torch."""
