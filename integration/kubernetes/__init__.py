"""A controller for HyperPodPyTorchJob on plain Kubernetes."""
