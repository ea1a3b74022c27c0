"""ISP inside other programs; no other package of ISP imports it."""
