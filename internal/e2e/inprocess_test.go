package e2e_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/gochannel"

	"github.com/watermill-inbox/inbox"
)

var errScripted = errors.New("scripted")

// newBroker returns a broker in memory, whose Publish returns when the message was acknowledged.
func newBroker() *gochannel.GoChannel {
	return gochannel.NewGoChannel(gochannel.Config{BlockPublishUntilSubscriberAck: true}, watermill.NopLogger{})
}

func newRouter(t *testing.T, middleware ...message.HandlerMiddleware) *message.Router {
	t.Helper()
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	router.AddMiddleware(middleware...)
	return router
}

func newDeduplicator(t *testing.T, config inbox.Config) *inbox.Deduplicator {
	t.Helper()
	dedup, err := inbox.NewDeduplicator(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if err := dedup.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return dedup
}

// start runs the router until the test ends.
func start(t *testing.T, router *message.Router) {
	t.Helper()
	ended := make(chan error)
	go func() { ended <- router.Run(context.Background()) }()
	<-router.Running()
	t.Cleanup(func() {
		if err := router.Close(); err != nil {
			t.Error(err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// collector is a publisher that keeps what it gets.
type collector struct {
	mu   sync.Mutex
	msgs []*message.Message
}

// Publish refuses messages whose context has ended, as brokers' publishers do.
func (c *collector) Publish(_ string, msgs ...*message.Message) error {
	for _, msg := range msgs {
		if err := msg.Context().Err(); err != nil {
			return err
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.msgs = append(c.msgs, msgs...)
	return nil
}

func (c *collector) Close() error { return nil }

// collected returns the messages so far.
func (c *collector) collected() []*message.Message {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.msgs[:len(c.msgs):len(c.msgs)]
}
