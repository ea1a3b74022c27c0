"""The runtime: communication, sharded weights, layers, attention, optimizer.

It needs torch, einops, numpy and pydantic; it imports `isp.utils` and nothing else of ISP.
"""
