package inbox

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

// NoTransientRetries as [Config].TransientRetries returns transient errors at once.
const NoTransientRetries = -1

// Config configures a [Deduplicator]. Only Store is required.
type Config struct {
	// Store opens the transactions and keeps the inbox table: see packages sqlstore and pgxstore. It must be comparable,
	// as pointers are. Required.
	Store Store

	// Consumer is who processes the messages. Messages are deduplicated per consumer, so processes that share a
	// consumer share the work, and consumers of different names each process every message. It has to stay the same
	// from release to release. Defaults to the name of the router's handler.
	Consumer string

	// MessageID returns a message's identity, the same for all of its deliveries. Any [middleware.MessageHasher] fits,
	// but not the Adler-32 one: at 32 bits, different messages share an ID, and then one of them is skipped. An error
	// or an empty ID is [ErrInvalidKey]. Defaults to the message's UUID.
	//
	// [middleware.MessageHasher]: https://pkg.go.dev/github.com/ThreeDotsLabs/watermill/message/router/middleware#MessageHasher
	MessageID func(*message.Message) (string, error)

	// Skip selects messages that go to the handler directly, without a transaction and without deduplication. Defaults
	// to none.
	Skip func(*message.Message) bool

	// Outputs says what becomes of the messages that a handler returns. Defaults to [OutputsReplay].
	Outputs OutputMode

	// Outbox receives the messages that handlers return, inside of their transaction, which the context of each message
	// carries: see package outbox. Required with [OutputsOutbox], refused without.
	Outbox message.Publisher

	// Fingerprint stores the SHA-256 of each payload and compares it on a duplicate: the same key with another payload
	// is [ErrPayloadMismatch] instead of a skip. For producers that are careless with IDs, or not trusted. Records
	// stored without a fingerprint match any payload. Defaults to off.
	Fingerprint bool

	// StorePayload stores each message's payload and metadata with its record, for later inspection. Defaults to off.
	StorePayload bool

	// LockTimeout bounds how long a delivery waits while another delivery of the same message is in flight, in this
	// process or in another. After that it ends in [ErrInFlight]. It is cut to fit the deadline of the message's
	// context. Defaults to 10 seconds.
	LockTimeout time.Duration

	// TransientRetries is how many times the whole unit (transaction, claim, handler) is run again, in a new
	// transaction, after a transient error such as a deadlock or a serialization failure. [NoTransientRetries] is none.
	// Defaults to 3.
	TransientRetries int

	// CommitTimeout bounds the COMMIT, and likewise a ROLLBACK. Neither ends with the message's context. Defaults to 10
	// seconds.
	CommitTimeout time.Duration

	// ShutdownGrace is how much longer a handler's context lives once the message's context was cancelled, as
	// [message.Router] does with every message in flight when it closes. A deadline of the message's context is kept.
	// Keep it below the router's CloseTimeout. Defaults to 0: the handler's context follows the message's.
	ShutdownGrace time.Duration

	// OnDuplicate is called for each duplicate, before it is acknowledged. Defaults to nothing.
	OnDuplicate func(OnDuplicateParams)

	// Observer is told of every delivery. Defaults to nobody.
	Observer Observer

	// Logger defaults to none.
	Logger watermill.LoggerAdapter
}

// OnDuplicateParams is what [Config].OnDuplicate is called with.
type OnDuplicateParams struct {
	// Message is the duplicate. It is nil in [Deduplicator.Process].
	Message *message.Message

	// Key is the key in its stored form.
	Key Key

	// ReceivedAt and ProcessedAt are when the first delivery was received and processed, by the database's clock.
	ReceivedAt, ProcessedAt time.Time

	// Outputs is how many recorded messages are handed to the router because they were not published yet.
	Outputs int
}

func (c *Config) setDefaults() {
	if c.MessageID == nil {
		c.MessageID = func(msg *message.Message) (string, error) { return msg.UUID, nil }
	}
	if c.LockTimeout == 0 {
		c.LockTimeout = 10 * time.Second
	}
	if c.TransientRetries == 0 {
		c.TransientRetries = 3
	}
	if c.CommitTimeout == 0 {
		c.CommitTimeout = 10 * time.Second
	}
	if c.Logger == nil {
		c.Logger = watermill.NopLogger{}
	}
}

// Validate reports every fault of the configuration, each naming its field.
func (c Config) Validate() error {
	var faults []error
	fault := func(format string, args ...any) {
		faults = append(faults, fmt.Errorf("inbox: Config."+format, args...))
	}

	switch store := reflect.ValueOf(c.Store); {
	case c.Store == nil || store.Kind() == reflect.Pointer && store.IsNil():
		fault("Store is required")
	case !store.Comparable():
		fault("Store must be comparable: use a pointer to %T", c.Store)
	}
	switch c.Outputs {
	case OutputsReplay, OutputsReject:
		if c.Outbox != nil {
			fault("Outbox is set, but Outputs is not OutputsOutbox")
		}
	case OutputsOutbox:
		if c.Outbox == nil {
			fault("Outbox is required with OutputsOutbox")
		}
	default:
		fault("Outputs: unknown mode %d", c.Outputs)
	}
	if c.LockTimeout < 0 {
		fault("LockTimeout is negative: %s", c.LockTimeout)
	}
	if c.CommitTimeout < 0 {
		fault("CommitTimeout is negative: %s", c.CommitTimeout)
	}
	if c.ShutdownGrace < 0 {
		fault("ShutdownGrace is negative: %s", c.ShutdownGrace)
	}
	if c.TransientRetries < NoTransientRetries {
		fault("TransientRetries is negative: %d", c.TransientRetries)
	}
	return errors.Join(faults...)
}

// Deduplicator runs handlers in transactions that also claim their message in the inbox, so that their effects happen
// once. It is safe for concurrent use; one serves any number of handlers and routers.
type Deduplicator struct {
	config     Config
	classifier TransientClassifier // nil if the store has none
	explainer  ErrorExplainer      // nil if the store has none
	inFlight   keyQueue
	commits    deadlines
	published  *publishedMarker // nil if the store cannot mark
}

// NewDeduplicator returns a Deduplicator, or the faults of the configuration. It starts nothing and opens no connection.
func NewDeduplicator(config Config) (*Deduplicator, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	config.setDefaults()

	d := &Deduplicator{config: config, commits: deadlines{timeout: config.CommitTimeout}}
	d.classifier, _ = config.Store.(TransientClassifier)
	d.explainer, _ = config.Store.(ErrorExplainer)
	if marker, ok := config.Store.(OutputsMarker); ok {
		d.published = newPublishedMarker(marker, config.CommitTimeout, config.Logger)
	}
	return d, nil
}

// Process runs fn once for the key, for callers without a router: webhooks, jobs, command-line tools. The context that
// fn receives carries the transaction, see [TxFromContext]; fn's writes are committed together with the claim, and
// undone when it returns an error (which Process returns untouched), panics or exits its goroutine.
//
// Process returns nil once this call committed, and [ErrDuplicate] if the key was processed before. After any other error
// call it again: an error of the commit itself may hide that it happened, and then the next call returns ErrDuplicate.
//
// An empty consumer means [Config].Consumer. Fingerprint and StorePayload do not apply, since there is no payload.
func (d *Deduplicator) Process(ctx context.Context, key Key, fn func(ctx context.Context) error) error {
	if key.Consumer == "" {
		key.Consumer = d.config.Consumer
	}
	run := &delivery{Deduplicator: d, fn: fn}
	run.event.Context = ctx //nolint:fatcontext // for the observer
	defer run.observe()

	var err error
	if run.claim.Key, err = key.Normalize(); err != nil {
		return run.end(err)
	}
	_, err = run.deliver(ctx)
	if err = run.end(err); err == nil && run.record != nil {
		// Outputs recorded by a router's delivery are not ours to publish; they stay for the router.
		return ErrDuplicate
	}
	return err
}

// IsTransient reports whether the store says of err that its transaction was undone and may succeed when the message is
// delivered again. It fits Watermill's Retry.ShouldRetry.
func (d *Deduplicator) IsTransient(err error) bool {
	return err != nil && d.classifier != nil && d.classifier.IsTransient(err)
}

// ShouldPoison reports whether a message that failed with err may go to a poison queue: it is the filter for Watermill's
// PoisonQueueWithFilter. It refuses what is not the message's fault, and so must be nacked and delivered again: a message
// in flight, an ended context, a transient error, a transaction that could not be begun, one whose connection was lost.
// Poisoning acknowledges the message, which would lose it if its delivery in flight is then rolled back.
func (d *Deduplicator) ShouldPoison(err error) bool {
	return err != nil &&
		!errors.Is(err, ErrInFlight) &&
		!errors.Is(err, context.Canceled) &&
		!errors.Is(err, context.DeadlineExceeded) &&
		!errors.Is(err, errNotBegun) &&
		!errors.Is(err, errConnectionLost) &&
		!d.IsTransient(err)
}

// Close waits until the outputs of every message that was handed to the router are marked as published, or until ctx
// ends. Call it after the router was closed. What is not marked by then is published again by the next duplicate, with
// the same UUIDs; the error says how much that is. Close is not needed for the guarantee.
//
// The Deduplicator can be used afterwards, but marks no outputs that it hands out from then on. Close may be called again, to
// mark what an earlier call left.
func (d *Deduplicator) Close(ctx context.Context) error {
	if d.published == nil {
		return nil
	}
	return d.published.close(ctx)
}
