"""Where specjax decodes inside other systems. Each is imported only when asked for."""
