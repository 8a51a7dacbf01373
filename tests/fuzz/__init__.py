"""Random requests to a real server: no call may end in a server error, stall the others or take memory."""
