"""How a traced model is cut: over pipeline stages, tensor ranks and in time."""
