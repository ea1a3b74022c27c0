"""How a traced model is cut: over pipeline stages and tensor ranks."""
