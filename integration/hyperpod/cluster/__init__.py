"""A HyperPod cluster as an administrator sees it: its memory flag, and its nodes' health."""
