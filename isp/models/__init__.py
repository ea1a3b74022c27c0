"""Models as the runtime sees them, and how one is built for a rank."""
