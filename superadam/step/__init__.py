"""One optimizer step: its gradients, the verdict over them, and the update that follows."""
