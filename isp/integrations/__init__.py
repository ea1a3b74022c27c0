"""ISP inside other programs; nothing of ISP imports it."""
