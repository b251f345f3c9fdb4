package inbox

// Config configures a [Deduplicator].
type Config struct {
	// Fingerprint: off.
	Fingerprint bool
	// StorePayload: off.
	StorePayload bool
}
