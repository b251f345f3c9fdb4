// Package inbox makes the effects of Watermill handlers happen exactly once in their database, although every broker
// delivers at least once.
package inbox
