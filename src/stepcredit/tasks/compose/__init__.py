"""tasks/compose"""
