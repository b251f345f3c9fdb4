package outbox

import (
	"context"
	stdsql "database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox/internal/beside"
)

// RelayConfig configures a [Relay].
type RelayConfig struct {
	Config

	// DB is the database of the outbox: [sql.BeginnerFromStdSQL] of a *sql.DB, or [sql.BeginnerFromPgx] of a pool. A
	// relay uses one connection. Required.
	DB sql.Beginner

	// Publisher is the broker's. Required.
	Publisher message.Publisher

	// BatchSize is how many messages are claimed, published and deleted in one transaction. A relay that is killed
	// publishes at most that many again. Defaults to 100.
	BatchSize int

	// PollInterval is the pause after the outbox was found empty. It doubles, up to MaxPollInterval, until there are
	// messages again. They default to 50 milliseconds and 1 second.
	PollInterval, MaxPollInterval time.Duration

	// RetryInterval is the pause after a publish or the database failed. Defaults to 1 second.
	RetryInterval time.Duration

	// StatementTimeout bounds each statement of the relay and its COMMIT, but not the time in Publisher. Defaults to 30
	// seconds.
	StatementTimeout time.Duration

	// Logger defaults to none.
	Logger watermill.LoggerAdapter
}

func (c *RelayConfig) setDefaults() {
	c.Config.setDefaults()
	if c.BatchSize == 0 {
		c.BatchSize = 100
	}
	if c.PollInterval == 0 {
		c.PollInterval = 50 * time.Millisecond
	}
	if c.MaxPollInterval == 0 {
		c.MaxPollInterval = max(time.Second, c.PollInterval)
	}
	if c.RetryInterval == 0 {
		c.RetryInterval = time.Second
	}
	if c.StatementTimeout == 0 {
		c.StatementTimeout = 30 * time.Second
	}
	if c.Logger == nil {
		c.Logger = watermill.NopLogger{}
	}
}

// Validate reports every fault of the configuration, each naming its field.
func (c RelayConfig) Validate() error {
	faults := []error{c.Config.Validate()}
	fault := func(text string) { faults = append(faults, errors.New("outbox: RelayConfig."+text)) }
	if c.DB == nil {
		fault("DB is required")
	}
	if c.Publisher == nil {
		fault("Publisher is required")
	}
	if c.BatchSize < 0 {
		fault("BatchSize is negative")
	}
	if c.PollInterval < 0 || c.MaxPollInterval < 0 || c.MaxPollInterval > 0 && c.MaxPollInterval < c.PollInterval {
		fault("PollInterval and MaxPollInterval have to be positive, and the latter not the shorter one")
	}
	if c.RetryInterval < 0 {
		fault("RetryInterval is negative")
	}
	if c.StatementTimeout < 0 {
		fault("StatementTimeout is negative")
	}
	return errors.Join(faults...)
}

// Relay publishes the messages of an outbox, each at least once and always with its own UUID, in the order of their
// offsets, and deletes them. Any number of relays, in any number of processes, share an outbox: each takes messages that
// no other holds. With several of them, or while publishing to a topic fails, the order between batches is not kept.
//
// A message whose transaction is still open is not seen, and holds up no other. A message that the broker refuses holds
// up those behind it for the same topic, and is tried again until it is published.
type Relay struct {
	config RelayConfig
	table  table
}

// NewRelay returns a Relay, or the faults of the configuration. It starts nothing.
func NewRelay(config RelayConfig) (*Relay, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	config.setDefaults()
	return &Relay{config: config, table: config.table()}, nil
}

// Run relays until ctx ends, and returns nil then. A batch that it is publishing at that time is finished first. Errors
// are logged and tried again.
func (r *Relay) Run(ctx context.Context) error {
	var pause time.Duration
	var sweep sweep
	for {
		timer := time.NewTimer(pause/2 + rand.N(pause+1)/2)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C:
			if ctx.Err() != nil {
				return nil //nolint:nilerr // its end is what ends Run
			}
		}
		claimed, err := r.relay(ctx, &sweep)
		if err != nil {
			r.config.Logger.Error("Relaying messages failed; trying again", err, watermill.LogFields{"topic": r.config.Topic})
		}
		switch {
		case claimed == r.config.BatchSize: // there may be more
			pause = 0
			continue
		case err != nil || len(sweep.failed) > 0:
			pause = r.config.RetryInterval
		case claimed > 0:
			pause = r.config.PollInterval
		default:
			pause = min(max(2*pause, r.config.PollInterval), r.config.MaxPollInterval)
		}
		sweep.reset()
	}
}

// Plugin returns a plugin that starts [Relay.Run] with the router. It ends within a second, after the batch that it is
// publishing, once ctx ends, or the router is closed or begins to close. The router does not wait for it; a batch that is cut
// off by the end of the process is published again.
//
// The relay publishes by its own publisher, past the router's middleware.
func (r *Relay) Plugin(ctx context.Context) message.RouterPlugin {
	return func(router *message.Router) error {
		go beside.Run(ctx, router.IsClosed, r.Run)
		return nil
	}
}

// sweep is one pass over the outbox. As long as nothing fails, each batch begins at the beginning, where the oldest
// messages are. Once a topic failed, its messages stay, and the pass goes on behind them to the other topics'.
type sweep struct {
	after  int64 // the offset up to which messages were tried
	failed []string
}

func (s *sweep) reset() { *s = sweep{} }

// RunOnce relays one batch, and returns how many messages it claimed. An error says that some of them were not published,
// or that the ones published could not be deleted: they will be published again.
func (r *Relay) RunOnce(ctx context.Context) (claimed int, err error) {
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	return r.relay(ctx, &sweep{})
}

func (r *Relay) relay(ctx context.Context, sweep *sweep) (claimed int, err error) {
	defer func() {
		if value := recover(); value != nil {
			err = fmt.Errorf("outbox: relay: panic: %v\n%s", value, debug.Stack())
		}
	}()
	// Once messages are published, their deletion must not be cut short by ctx.
	txCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	tx, err := bounded(txCtx, r.config.StatementTimeout, cancel, func(context.Context) (sql.Tx, error) {
		return r.config.DB.BeginTx(txCtx, &stdsql.TxOptions{Isolation: stdsql.LevelReadCommitted})
	})
	if err != nil {
		return 0, fmt.Errorf("outbox: begin transaction: %w", err)
	}
	committed := false
	defer func() {
		if !committed {
			_ = tx.Rollback() // undone by the server at the latest when the connection closes
		}
	}()

	batch, err := bounded(txCtx, r.config.StatementTimeout, nil, func(ctx context.Context) ([]row, error) {
		return r.claim(ctx, tx, sweep.after)
	})
	if err != nil {
		return 0, fmt.Errorf("outbox: claim messages: %w", err)
	}
	published, publishErr := r.publish(batch, sweep)
	if len(published) == 0 {
		return len(batch), publishErr
	}
	_, err = bounded(txCtx, r.config.StatementTimeout, cancel, func(ctx context.Context) (struct{}, error) {
		if _, err := tx.ExecContext(ctx, r.table.delete(published)); err != nil {
			return struct{}{}, err
		}
		committed = true
		return struct{}{}, tx.Commit()
	})
	if err != nil {
		return len(batch), errors.Join(fmt.Errorf("outbox: delete published messages: %w", err), publishErr)
	}
	return len(batch), publishErr
}

// bounded runs fn for at most timeout. What ignores its context is ended by cancel.
func bounded[T any](ctx context.Context, timeout time.Duration, cancel context.CancelFunc, fn func(context.Context) (T, error)) (T, error) {
	if cancel != nil {
		timer := time.AfterFunc(timeout, cancel)
		defer timer.Stop()
	}
	ctx, cancelTimeout := context.WithTimeout(ctx, timeout)
	defer cancelTimeout()
	return fn(ctx)
}

// row is a message in the outbox.
type row struct {
	offset   int64
	envelope []byte
}

func (r *Relay) claim(ctx context.Context, tx sql.Tx, after int64) ([]row, error) {
	rows, err := tx.QueryContext(ctx, r.table.claim, after, r.config.BatchSize)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var batch []row
	for rows.Next() {
		var next row
		if err := rows.Scan(&next.offset, &next.envelope); err != nil {
			return nil, err
		}
		batch = append(batch, next)
	}
	// watermill-sql's interface has no Err, but what is behind it does.
	if failed, ok := rows.(interface{ Err() error }); ok && failed.Err() != nil {
		return nil, failed.Err()
	}
	return batch, rows.Close()
}

// envelope is what Watermill's forwarder wraps a message in.
type envelope struct {
	DestinationTopic string            `json:"destination_topic"`
	UUID             string            `json:"uuid"`
	Payload          []byte            `json:"payload"`
	Metadata         map[string]string `json:"metadata"`
}

// publish publishes the batch in order, without the topics that failed before in this sweep, and returns the offsets of
// what was published.
func (r *Relay) publish(batch []row, sweep *sweep) ([]int64, error) {
	published := make([]int64, 0, len(batch))
	var errs []error
	for rest := batch; len(rest) > 0; {
		topic, msgs, err := r.run(rest)
		if err != nil {
			errs = append(errs, fmt.Errorf("outbox: read message at offset %d: %w", rest[0].offset, err))
			rest = rest[1:]
			continue
		}
		if !slices.Contains(sweep.failed, topic) {
			n, err := r.publishRun(topic, msgs)
			for _, row := range rest[:n] {
				published = append(published, row.offset)
			}
			if err != nil {
				sweep.failed = append(sweep.failed, topic)
				errs = append(errs, fmt.Errorf("outbox: publish to %q: message %q: %w", topic, msgs[n].UUID, err))
			}
		}
		rest = rest[len(msgs):]
	}
	if len(published) < len(batch) {
		sweep.after = batch[len(batch)-1].offset
	}
	return published, errors.Join(errs...)
}

// run returns the messages at the beginning of the batch that go to the same topic.
func (r *Relay) run(batch []row) (topic string, msgs []*message.Message, err error) {
	for _, row := range batch {
		var e envelope
		if err := json.Unmarshal(row.envelope, &e); err != nil || e.DestinationTopic == "" {
			if len(msgs) > 0 {
				break
			}
			return "", nil, errors.Join(errors.New("not an envelope of Watermill's forwarder"), err)
		}
		if len(msgs) > 0 && e.DestinationTopic != topic {
			break
		}
		topic = e.DestinationTopic
		msg := message.NewMessage(e.UUID, e.Payload)
		for name, value := range e.Metadata {
			msg.Metadata.Set(name, value)
		}
		msgs = append(msgs, msg)
	}
	return topic, msgs, nil
}

// publishRun publishes the messages in one call, or, when that fails, one by one up to the first that fails. It returns
// how many were published.
func (r *Relay) publishRun(topic string, msgs []*message.Message) (int, error) {
	err := r.config.Publisher.Publish(topic, msgs...)
	if err == nil {
		return len(msgs), nil
	}
	if len(msgs) == 1 {
		return 0, err
	}
	for i, msg := range msgs {
		if err := r.config.Publisher.Publish(topic, msg.Copy()); err != nil {
			return i, err
		}
	}
	return len(msgs), nil
}
