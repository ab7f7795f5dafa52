"""Serving: everything of kvplan that has an effect. It loads neither NIXL nor torch."""
