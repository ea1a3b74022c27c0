"""How context ranks exchange keys and values, and how they attend to them."""
