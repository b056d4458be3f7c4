"""Plain Kubernetes clusters: a controller for ``HyperPodPyTorchJob``, and what it needs to be installed."""
