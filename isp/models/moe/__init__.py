"""Experts: gathered weights or dispatched tokens, load balance and router losses."""
