package inbox

import (
	"context"
	"slices"
	"sync"
	"time"
)

// keyQueue lets the deliveries of one key in this process go one after the other, first come first served. Waiting
// here costs no connection; waiting in the database costs one per waiter, and a pool is soon used up.
type keyQueue struct {
	mu      sync.Mutex
	waiters map[Key][]chan struct{} // a key is present while a delivery holds it
}

// acquire takes the key, waiting for at most limit. It returns ErrInFlight or the context's error if it did not get it.
func (q *keyQueue) acquire(ctx context.Context, key Key, limit time.Duration) error {
	q.mu.Lock()
	waiters, held := q.waiters[key]
	if !held {
		if q.waiters == nil {
			q.waiters = make(map[Key][]chan struct{})
		}
		q.waiters[key] = nil
		q.mu.Unlock()
		return nil
	}
	turn := make(chan struct{})
	q.waiters[key] = append(waiters, turn)
	q.mu.Unlock()

	timer := time.NewTimer(limit)
	defer timer.Stop()
	var err error
	select {
	case <-turn:
		return nil
	case <-timer.C:
		err = ErrInFlight
	case <-ctx.Done():
		err = ctx.Err()
	}

	q.mu.Lock()
	defer q.mu.Unlock()
	waiters = q.waiters[key]
	if i := slices.Index(waiters, turn); i >= 0 {
		q.waiters[key] = slices.Delete(waiters, i, i+1)
	} else { // the turn came at the same moment
		q.next(key)
	}
	return err
}

func (q *keyQueue) release(key Key) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.next(key)
}

// next hands the key to whoever waited longest. The lock is held.
func (q *keyQueue) next(key Key) {
	waiters := q.waiters[key]
	if len(waiters) == 0 {
		delete(q.waiters, key)
		return
	}
	close(waiters[0])
	q.waiters[key] = waiters[1:]
}
