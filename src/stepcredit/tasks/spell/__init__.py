"""The desk task ``spell``: short words in real fonts on a 16x48 canvas, read by a real OCR engine."""
