"""``stepcredit pretrain``."""
