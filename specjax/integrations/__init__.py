"""Decoding with specjax inside other systems. Import each module explicitly."""
