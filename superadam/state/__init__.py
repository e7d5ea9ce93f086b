"""Parameters and their state: master, moments, and the passes over them."""
