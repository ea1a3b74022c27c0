"""ISP inside other training programs (transformers, accelerate, verl).

No other package of ISP imports this one, so those programs need not be installed.
"""
