package sqlstore

// PretendVersion makes the store take the server for another one, by what SELECT VERSION() says there.
func (s *Store) PretendVersion(text string) {
	version := parseVersion(text)
	s.server.Store(&version)
}

// HasSkipLocked tells of a server by what SELECT VERSION() says there.
func HasSkipLocked(text string) bool { return parseVersion(text).hasSkipLocked() }
