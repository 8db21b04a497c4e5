"""Llamastead keeps many llama.cpp models behind one port."""
