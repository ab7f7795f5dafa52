"""Transfers through a staging buffer, for layouts that leave only short runs between them."""
