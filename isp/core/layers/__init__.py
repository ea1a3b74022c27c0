"""The layers a model is made of; the table of modes is in `isp.core.layers.linear`."""
