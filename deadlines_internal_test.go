package inbox

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestDeadlines(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := &deadlines{timeout: time.Second}
		type key struct{}
		parent, cancelParent := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
		first, cancelFirst := d.begin(parent)
		defer cancelFirst()
		cancelParent()

		// Many come and go while the first lasts, and others begin later.
		for range 10 {
			passing, cancel := d.begin(parent)
			if err := passing.Err(); err != nil {
				t.Fatal(err)
			}
			cancel()
			if err := passing.Err(); !errors.Is(err, context.Canceled) {
				t.Errorf("error %v after its cancellation", err)
			}
		}
		time.Sleep(400 * time.Millisecond)
		second, cancelSecond := d.begin(parent)
		defer cancelSecond()
		child, cancelChild := context.WithCancel(second)
		defer cancelChild()

		time.Sleep(600*time.Millisecond - 1)
		synctest.Wait()
		if err := first.Err(); err != nil || first.Value(key{}) != "value" {
			t.Fatalf("error %v before the deadline, value %v", err, first.Value(key{}))
		}
		<-first.Done()
		if deadline, ok := first.Deadline(); !ok || !deadline.Equal(time.Now()) {
			t.Errorf("ended at %v, deadline %v", time.Now(), deadline)
		}
		if err := first.Err(); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v after the deadline", err)
		}

		<-child.Done()
		if deadline, _ := second.Deadline(); !deadline.Equal(time.Now()) || !errors.Is(context.Cause(child), context.DeadlineExceeded) {
			t.Errorf("ended at %v, deadline %v, cause %v", time.Now(), deadline, context.Cause(child))
		}

		// The timer has stopped, and starts again.
		time.Sleep(time.Hour)
		if d.running || d.pending.Len() > 0 {
			t.Errorf("the timer runs: %t, for %d contexts", d.running, d.pending.Len())
		}
		third, cancelThird := d.begin(parent)
		defer cancelThird()
		began := time.Now()
		<-third.Done()
		if took := time.Since(began); took != time.Second {
			t.Errorf("ended after %s", took)
		}
	})
}
