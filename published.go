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
	watched  map[Key][]handedOut
	unmarked map[Key]struct{} // acknowledged
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
	ctx   context.Context //nolint:containedctx // what msg carries may be replaced by the router at any time
	since time.Time
}

func newPublishedMarker(store OutputsMarker, timeout time.Duration, logger watermill.LoggerAdapter) *publishedMarker {
	return &publishedMarker{
		store: store, timeout: timeout, logger: logger, watched: make(map[Key][]handedOut), unmarked: make(map[Key]struct{}),
	}
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
	p.watched[key] = append(p.watched[key], handedOut{msg: msg, ctx: ctx, since: time.Now()})
	p.start() //nolint:contextcheck // for many messages
}

// forget drops what is known of the key, which is about to have new outputs: its record was deleted, so that what was
// acknowledged before says nothing of them.
func (p *publishedMarker) forget(key Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.watched, key)
	delete(p.unmarked, key)
}

// start returns the goroutine, which it starts if there is something to do, or nil. It is called with the lock held.
func (p *publishedMarker) start() *markerRun {
	if p.running == nil && p.left() > 0 {
		ctx, cancel := context.WithCancel(context.Background())
		p.running = &markerRun{cancel: cancel, ended: make(chan struct{})}
		go p.run(ctx, p.running)
	}
	return p.running
}

func (p *publishedMarker) left() int { return len(p.watched) + len(p.unmarked) }

func (p *publishedMarker) run(ctx context.Context, run *markerRun) {
	defer close(run.ended)
	defer run.cancel()
	interval := markInterval
	for p.goesOn(ctx) {
		timer := time.NewTimer(interval)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			continue
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

// goesOn reports whether there is anything left to do, and time for it. If not, the goroutine that asked has to end.
func (p *publishedMarker) goesOn(ctx context.Context) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.left() == 0 || ctx.Err() != nil {
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
	for key, messages := range p.watched {
		messages = slices.DeleteFunc(messages, func(m handedOut) bool {
			acked, nacked := settled(m.msg)
			if acked {
				p.unmarked[key] = struct{}{}
			}
			age := now.Sub(m.since)
			return acked || nacked || age > unsettledAtMost || age > unsettledAfterEnd && m.ctx.Err() != nil
		})
		if _, acked := p.unmarked[key]; acked || len(messages) == 0 {
			delete(p.watched, key)
		} else {
			p.watched[key] = messages
		}
	}
	keys := make([]Key, 0, min(len(p.unmarked), markBatchSize))
	for key := range p.unmarked {
		if len(keys) == markBatchSize {
			break
		}
		keys = append(keys, key)
	}
	return keys
}

// mark marks keys that are unmarked.
func (p *publishedMarker) mark(ctx context.Context, keys []Key) error {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	if err := p.store.MarkOutputsPublished(ctx, keys); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, key := range keys {
		delete(p.unmarked, key)
	}
	return nil
}

// proven reports whether the key's outputs were published and the mark is only still to be written.
func (p *publishedMarker) proven(key Key) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, unmarked := p.unmarked[key]
	return unmarked || slices.ContainsFunc(p.watched[key], func(m handedOut) bool {
		acked, _ := settled(m.msg)
		return acked
	})
}

// close lets the goroutine finish its work, and stops it when ctx ends.
func (p *publishedMarker) close(ctx context.Context) error {
	for {
		p.mu.Lock()
		p.closed = true
		run := p.start() //nolint:contextcheck // it is stopped below
		p.mu.Unlock()
		if run == nil {
			return nil
		}
		select {
		case <-run.ended: // with its work, or with another call's context
			continue
		case <-ctx.Done():
			run.cancel()
			<-run.ended
		}
		p.mu.Lock()
		left := p.left()
		p.mu.Unlock()
		if left == 0 {
			return nil
		}
		return fmt.Errorf("inbox: mark outputs as published: those of %d messages are left: %w", left, ctx.Err())
	}
}
