"""What the bus costs, beside what one would use instead, measured in the same run."""
