"""The on-disk format of docs/reference/format.md: layouts, manifests, slices, keys. No torch."""
