"""A HyperPod cluster's tiered storage setting and the health of its nodes."""
