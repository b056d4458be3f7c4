"""SageMaker HyperPod: what its operator, its elastic agent and AWS's own clients speak, spoken here."""
