package inbox

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

const (
	// markInterval is how often messages are checked for their acknowledgment.
	markInterval = 50 * time.Millisecond

	// markBatchSize is how many keys are marked in one call of the store.
	markBatchSize = 200

	// maxMarkInterval is the longest pause after the store failed. The first ones are shorter: after a lost connection the
	// next one will do, and what a process that dies has not marked is published again.
	maxMarkInterval = 2 * time.Second

	// A message that was handed to the router and is settled neither this long after its context ended nor this long
	// at all never will be. What stays unmarked is published again by the next duplicate.
	unsettledAfterEnd, unsettledAtMost = time.Minute, time.Hour
)

// publishedMarker marks recorded outputs as published, once the router acknowledged their message. It looks at the
// messages in intervals, off their path and many at a time. Its goroutine starts with the first message and ends when
// there is none left.
type publishedMarker struct {
	store   OutputsMarker
	timeout time.Duration
	logger  watermill.LoggerAdapter

	mu       sync.Mutex
	watched  []handedOut
	unmarked []Key // acknowledged
	running  *markerRun
	closed   bool
}

// markerRun is the goroutine while there is one.
type markerRun struct {
	cancel context.CancelFunc
	ended  chan struct{}
}

// handedOut is a message whose outputs are with the router.
type handedOut struct {
	msg   *message.Message
	key   Key
	ctx   context.Context //nolint:containedctx // what msg carries may be replaced by the router at any time
	since time.Time
}

func newPublishedMarker(store OutputsMarker, timeout time.Duration, logger watermill.LoggerAdapter) *publishedMarker {
	return &publishedMarker{store: store, timeout: timeout, logger: logger}
}

// watch marks the key's outputs as published once msg is acknowledged. The router acknowledges after it published, so
// the acknowledgment proves it, unless it came before or cannot come at all.
func (p *publishedMarker) watch(ctx context.Context, msg *message.Message, key Key) {
	if acked, nacked := settled(msg); acked || nacked || msg.Acked() == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return
	}
	p.watched = append(p.watched, handedOut{msg: msg, key: key, ctx: ctx, since: time.Now()})
	if p.running == nil {
		ctx, cancel := context.WithCancel(context.Background())
		p.running = &markerRun{cancel: cancel, ended: make(chan struct{})}
		go p.run(ctx, p.running) //nolint:contextcheck // for many messages
	}
}

func (p *publishedMarker) run(ctx context.Context, run *markerRun) {
	defer close(run.ended)
	defer run.cancel()
	interval := markInterval
	for p.pending() {
		timer := time.NewTimer(interval)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
		for keys := p.collect(); len(keys) > 0; keys = p.collect() {
			if err := p.mark(ctx, keys); err != nil {
				interval = min(2*interval, maxMarkInterval)
				p.logger.Error("Marking outputs as published failed; trying again", err,
					watermill.LogFields{"retry_interval": interval.String()})
				break
			}
			interval = markInterval
		}
	}
}

// pending reports whether anything is left to do. If not, the goroutine that asked has to end.
func (p *publishedMarker) pending() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.watched) == 0 && len(p.unmarked) == 0 {
		p.running = nil
		return false
	}
	return true
}

// collect sorts out the watched messages and returns keys to mark, at most a batch. They stay unmarked until mark
// succeeded.
func (p *publishedMarker) collect() []Key {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	p.watched = slices.DeleteFunc(p.watched, func(m handedOut) bool {
		acked, nacked := settled(m.msg)
		if acked {
			p.unmarked = append(p.unmarked, m.key)
		}
		age := now.Sub(m.since)
		return acked || nacked || age > unsettledAtMost || age > unsettledAfterEnd && m.ctx.Err() != nil
	})
	return slices.Clone(p.unmarked[:min(len(p.unmarked), markBatchSize)])
}

// mark marks the first of the unmarked keys.
func (p *publishedMarker) mark(ctx context.Context, keys []Key) error {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	if err := p.store.MarkOutputsPublished(ctx, keys); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.unmarked = slices.Delete(p.unmarked, 0, len(keys))
	return nil
}

// proven reports whether the key's outputs were published and the mark is only still to be written.
func (p *publishedMarker) proven(key Key) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Contains(p.unmarked, key) || slices.ContainsFunc(p.watched, func(m handedOut) bool {
		acked, _ := settled(m.msg)
		return acked && m.key == key
	})
}

// close lets the goroutine finish its work, and stops it when ctx ends.
func (p *publishedMarker) close(ctx context.Context) error {
	p.mu.Lock()
	p.closed = true
	run := p.running
	p.mu.Unlock()
	if run == nil {
		return nil
	}
	select {
	case <-run.ended:
		return nil
	case <-ctx.Done():
		run.cancel()
		<-run.ended
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if left := len(p.watched) + len(p.unmarked); left > 0 {
		return fmt.Errorf("inbox: mark outputs as published: %d messages left: %w", left, ctx.Err())
	}
	return nil
}
