"""Any value as text, and plans as pictures."""
