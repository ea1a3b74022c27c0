"""What a run will take: memory, transfers and time of every layout, without starting ranks."""
