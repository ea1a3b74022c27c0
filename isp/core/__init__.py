"""The runtime: communication, sharded weights, layers, attention, optimizer.

It needs torch, einops and numpy; it imports `isp.utils` and nothing else of ISP.
"""
