"""`isp check` and `isp.check`: layouts of a model compared with the plain model, in float64."""
