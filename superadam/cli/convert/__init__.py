"""`superadam convert`: what to pass to superadam for the settings of a configuration of DeepSpeed."""
