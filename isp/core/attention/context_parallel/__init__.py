"""The exchange of keys and values between context ranks, and attention to them."""
