"""Gateway: client connections, authentication, tickets and the byte path; stateless, any number of them."""
