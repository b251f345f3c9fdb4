package inbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox/internal/txctx"
)

// delivery is one message, or one call of Process, on its way through the inbox. Either msg and handler are set, or fn.
type delivery struct {
	*Deduplicator
	msg     *message.Message
	handler message.HandlerFunc
	fn      func(context.Context) error

	claim  Claim
	record *Record // of the delivery that this one repeats
	event  DeliveryEvent
}

// handleMessage takes the delivery from the message to the messages that the router shall publish.
func (r *delivery) handleMessage(ctx context.Context) ([]*message.Message, error) {
	var err error
	if r.claim.Key, err = r.key(r.msg); err != nil { //nolint:contextcheck // it is the message's context
		return nil, r.end(err)
	}
	if r.config.Fingerprint {
		r.claim.Fingerprint = fingerprint(r.msg)
	}
	if r.config.StorePayload {
		r.claim.Message = r.msg.Copy() // the handler may change it, and be run again
	}

	outputs, err := r.deliver(ctx)
	if r.end(err) != nil {
		if acked, _ := settled(r.msg); acked {
			r.config.Logger.Error("Message failed, but was acknowledged before: the broker will not deliver it again", err, r.logFields())
		}
		return nil, err
	}
	if r.record != nil {
		r.duplicate(len(outputs))
	}
	if len(outputs) > 0 && r.published != nil {
		r.published.watch(ctx, r.msg, r.claim.Key)
	}
	return outputs, nil
}

// duplicate reports that the delivery was skipped.
func (r *delivery) duplicate(outputs int) {
	r.config.Logger.Debug("Skipping duplicate message", r.logFields())
	if r.config.OnDuplicate != nil {
		r.config.OnDuplicate(OnDuplicateParams{
			Message:     r.msg,
			Key:         r.claim.Key,
			ReceivedAt:  r.record.ReceivedAt,
			ProcessedAt: r.record.ProcessedAt,
			Outputs:     outputs,
		})
	}
}

// deliver waits for the key, then runs the unit of transaction, claim and handler until it does not end in a transient
// error. It returns the recorded messages that were not published yet.
func (r *delivery) deliver(ctx context.Context) ([]*message.Message, error) {
	if r.config.ShutdownGrace > 0 {
		var cancel context.CancelFunc
		ctx, cancel = withGrace(ctx, r.config.ShutdownGrace)
		defer cancel()
	}
	if txctx.Find(ctx, r.isSameClaim) != nil {
		return nil, errors.New("inbox: begin delivery: the context carries this inbox's transaction for this message " +
			"already: the middleware was added twice")
	}
	if err := context.Cause(ctx); err != nil {
		return nil, fmt.Errorf("inbox: begin delivery: %w", alsoError{err, ctx.Err()})
	}

	waitFrom := time.Now()
	limit := lockTimeout(ctx, r.config.LockTimeout, waitFrom)
	err := r.inFlight.acquire(ctx, r.claim.Key, limit)
	waited := time.Since(waitFrom)
	r.event.Claim += waited
	if err != nil {
		return nil, fmt.Errorf("inbox: wait for the delivery in flight: %w", err)
	}
	defer r.inFlight.release(r.claim.Key)

	for r.event.Retries = 0; ; r.event.Retries++ {
		r.claim.LockTimeout = lockTimeout(ctx, max(limit-waited, time.Millisecond), time.Now())
		outputs, err := r.attempt(ctx)
		if err == nil || r.event.Retries >= r.config.TransientRetries || !r.IsTransient(err) || !pause(ctx, r.event.Retries) {
			return outputs, err
		}
		r.config.Logger.Debug("Running the message again after a transient error: "+err.Error(), r.logFields())
	}
}

func (r *delivery) isSameClaim(frame *txctx.Frame) bool {
	return frame.Key == any(r.claim.Key) && frame.Store == any(r.config.Store)
}

// attempt runs the unit once. Whatever happens in it, its transaction is over when attempt is left.
func (r *delivery) attempt(ctx context.Context) ([]*message.Message, error) {
	started := time.Now()
	tx, err := r.config.Store.Begin(ctx, r.claim)
	claimed := time.Now()
	r.event.Claim += claimed.Sub(started)
	if err != nil {
		return nil, alsoError{withEnd(ctx, err), errNotBegun}
	}
	over := false
	defer func() { // on a panic and a Goexit too
		if !over {
			r.rollback(ctx, tx) //nolint:contextcheck // outlives the message's
		}
	}()
	fail := func(err error) error {
		over = true
		r.rollback(ctx, tx) //nolint:contextcheck // outlives the message's
		if detector, ok := tx.(LossDetector); ok && detector.ConnectionLost() {
			return alsoError{err, errConnectionLost}
		}
		return err
	}

	if record := tx.Recorded(); record != nil {
		if r.claim.Fingerprint != nil && record.Fingerprint != nil && !bytes.Equal(r.claim.Fingerprint, record.Fingerprint) {
			return nil, ErrPayloadMismatch
		}
		r.record = record
		if len(record.Outputs) == 0 || r.published != nil && r.published.proven(r.claim.Key) {
			return nil, nil
		}
		r.event.Outputs = len(record.Outputs)
		return freshCopies(context.WithoutCancel(r.event.Context), record.Outputs), nil //nolint:contextcheck // the message's own
	}

	outputs, err := r.produce(ctx, tx)
	handled := time.Now()
	r.event.Handler += handled.Sub(claimed)
	if err != nil {
		return nil, fail(err)
	}

	r.warnIfSettled()
	if len(outputs) > 0 && r.published != nil {
		r.published.forget(r.claim.Key)
	}
	commitCtx, cancel := r.commits.begin(ctx)
	defer cancel()
	err = tx.Commit(commitCtx, outputs)
	r.event.Commit += time.Since(handled)
	if err != nil {
		return nil, fail(withEnd(commitCtx, err))
	}
	over = true
	r.event.Outputs = len(outputs)
	return outputs, nil
}

// produce runs the handler, whose context carries the transaction, and returns those messages that are to be recorded.
func (r *delivery) produce(ctx context.Context, tx Tx) ([]*message.Message, error) {
	frame := &txctx.Frame{Native: tx.Native(), Store: r.config.Store, Key: r.claim.Key}
	defer frame.End() // on a panic and a Goexit too
	ctx = txctx.With(ctx, frame)
	produced, err := r.run(ctx)
	if err != nil {
		r.explain(err)
		return nil, keepEnd(ctx, err)
	}
	return r.accept(ctx, produced)
}

// run runs the handler, or the function given to Process.
func (r *delivery) run(ctx context.Context) ([]*message.Message, error) {
	if r.fn != nil {
		return nil, r.fn(ctx)
	}
	r.msg.SetContext(ctx)
	return r.handler(r.msg)
}

func (r *delivery) rollback(ctx context.Context, tx Tx) {
	ctx, cancel := r.commits.begin(ctx)
	defer cancel()
	if err := tx.Rollback(ctx); err != nil {
		r.config.Logger.Error("Rollback failed; the database undoes the transaction when it sees the connection closed",
			err, r.logFields())
	}
}

// explain logs what usually lies behind the handler's error, which itself is returned untouched.
func (r *delivery) explain(err error) {
	if r.explainer == nil {
		return
	}
	if hint := r.explainer.ExplainError(err); hint != "" {
		r.config.Logger.Error("Handler failed: "+hint, err, r.logFields())
	}
}

// warnIfSettled tells of a message that was acknowledged although nothing is committed yet: by its handler, or by
// Watermill's InstantAck.
func (r *delivery) warnIfSettled() {
	if r.msg == nil {
		return
	}
	if acked, _ := settled(r.msg); acked {
		r.config.Logger.Error("Message was acknowledged before its commit: it is lost if the commit fails",
			errAckedEarly, r.logFields())
	}
}

var errAckedEarly = errors.New("inbox: message acknowledged before its commit")

// lockTimeout cuts the timeout so that it ends before the context does: a wait that the context ends costs the
// connection.
func lockTimeout(ctx context.Context, timeout time.Duration, now time.Time) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		timeout = min(timeout, deadline.Sub(now)*4/5)
	}
	return max(timeout, time.Millisecond)
}

// pause waits before another attempt, longer each time and never the same; false if the context ended.
func pause(ctx context.Context, attempt int) bool {
	base := 5 * time.Millisecond << min(attempt, 6)
	timer := time.NewTimer(base + rand.N(base))
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// withGrace returns a context that lives for grace longer than ctx, except that it keeps ctx's deadline.
func withGrace(ctx context.Context, grace time.Duration) (context.Context, context.CancelFunc) {
	graced, cancel := context.WithCancel(context.WithoutCancel(ctx))
	if deadline, ok := ctx.Deadline(); ok {
		graced, cancel = withDeadline(graced, cancel, deadline)
	}
	stop := context.AfterFunc(ctx, func() {
		timer := time.NewTimer(grace)
		defer timer.Stop()
		select {
		case <-timer.C:
			cancel()
		case <-graced.Done():
		}
	})
	return graced, func() {
		stop()
		cancel()
	}
}

func withDeadline(ctx context.Context, cancel context.CancelFunc, deadline time.Time) (context.Context, context.CancelFunc) {
	limited, cancelLimited := context.WithDeadline(ctx, deadline)
	return limited, func() {
		cancelLimited()
		cancel()
	}
}

var (
	// errNotBegun means that a transaction could not be begun, or the key neither be claimed nor be proven a duplicate.
	errNotBegun = errors.New("inbox: no transaction")

	// errConnectionLost means that the transaction failed with its connection.
	errConnectionLost = errors.New("inbox: connection lost")
)

// alsoError is an error that is another one as well: that of the context that ended meanwhile, or one of those above. It
// reads like the error itself, so that what matches a handler's error by its text still does.
type alsoError struct{ err, also error }

func (e alsoError) Error() string   { return e.err.Error() }
func (e alsoError) Unwrap() []error { return []error{e.err, e.also} }

// keepEnd makes errors.Is find the context's error in err if the context ended, and leaves err untouched otherwise.
func keepEnd(ctx context.Context, err error) error {
	if end := ctx.Err(); end != nil && !errors.Is(err, end) {
		return alsoError{err, end}
	}
	return err
}

// withEnd is keepEnd for errors of ours, whose text may say it.
func withEnd(ctx context.Context, err error) error {
	if end := ctx.Err(); end != nil && !errors.Is(err, end) {
		return fmt.Errorf("%w (%w)", err, end)
	}
	return err
}
