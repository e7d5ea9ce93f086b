"""What the machine says of itself, and what runs on which of its cores."""
