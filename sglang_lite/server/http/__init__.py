"""HTTP layer, independent of protocols: bodies within limits, server-sent events, sockets."""
