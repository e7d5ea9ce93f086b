"""One step: its gradients, the verdict over them, and what comes of it."""
