"""SageMaker HyperPod: its operator, its elastic agent, its job resource and its command-line tools."""
