package e2e_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill-amqp/v3/pkg/amqp"
	"github.com/ThreeDotsLabs/watermill/message"
	amqp091 "github.com/rabbitmq/amqp091-go"
)

func amqpConfig(url string) amqp.Config {
	config := amqp.NewDurableQueueConfig(url)
	config.Publish.ConfirmDelivery = true
	config.Consume.Qos.PrefetchCount = 10
	return config
}

// quorumConfig has quorum queues instead of classic ones.
func quorumConfig(url string) amqp.Config {
	config := amqpConfig(url)
	config.Queue.Arguments = amqp091.Table{amqp091.QueueTypeArg: amqp091.QueueTypeQuorum}
	config.Marshaler = quorumMarshaler{}
	return config
}

// quorumMarshaler leaves out the header in which a quorum queue counts deliveries: it is not a string, and watermill-amqp
// would refuse each redelivery, for ever.
type quorumMarshaler struct{ amqp.DefaultMarshaler }

func (m quorumMarshaler) Unmarshal(delivery amqp091.Delivery) (*message.Message, error) {
	delete(delivery.Headers, "x-delivery-count")
	return m.DefaultMarshaler.Unmarshal(delivery)
}

// openChannel returns a channel of a connection of its own.
func openChannel(url string) (*amqp091.Connection, *amqp091.Channel, error) {
	conn, err := amqp091.Dial(url)
	if err != nil {
		return nil, nil, err
	}
	channel, err := conn.Channel()
	if err != nil {
		_ = conn.Close()
		return nil, nil, err
	}
	return conn, channel, nil
}

func onChannel(t *testing.T, url string, run func(*amqp091.Channel) error) {
	t.Helper()
	conn, channel, err := openChannel(url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := run(channel); err != nil {
		t.Fatal(err)
	}
}

// declare declares queues as watermill-amqp does: RabbitMQ drops what is published to one that is not there.
func declare(t *testing.T, config amqp.Config, queues ...string) {
	t.Helper()
	onChannel(t, config.Connection.AmqpURI, func(channel *amqp091.Channel) error {
		for _, queue := range queues {
			if _, err := channel.QueueDeclare(queue, true, false, false, false, config.Queue.Arguments); err != nil {
				return err
			}
		}
		return nil
	})
}

// publish publishes messages until the broker confirmed each of them, which it may have to do again while that is down.
func publish(ctx context.Context, url, queue string, msgs ...*message.Message) error {
	for {
		unconfirmed, err := publishOnce(ctx, url, queue, msgs)
		if len(unconfirmed) == 0 {
			return nil
		}
		msgs = unconfirmed
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// publishOnce returns the messages that were not confirmed.
func publishOnce(ctx context.Context, url, queue string, msgs []*message.Message) ([]*message.Message, error) {
	conn, channel, err := openChannel(url)
	if err != nil {
		return msgs, err
	}
	defer func() { _ = conn.Close() }()
	if err := channel.Confirm(false); err != nil {
		return msgs, err
	}
	const window = 200 // so many at a time
	for len(msgs) > 0 {
		batch := msgs[:min(window, len(msgs))]
		var confirmations []*amqp091.DeferredConfirmation
		for _, msg := range batch {
			publishing, err := amqp.DefaultMarshaler{}.Marshal(msg)
			if err != nil {
				return msgs, err
			}
			confirmation, err := channel.PublishWithDeferredConfirmWithContext(ctx, "", queue, false, false, publishing)
			if err != nil {
				return msgs, err
			}
			confirmations = append(confirmations, confirmation)
		}
		for _, confirmation := range confirmations {
			if acked, err := confirmation.WaitContext(ctx); err != nil || !acked {
				return msgs, errors.Join(err, errors.New("not confirmed"))
			}
		}
		msgs = msgs[len(batch):]
	}
	return nil, nil
}

// inspect returns the broker's view of a queue: how many consumers it has, and how many messages beside those that the
// consumers were sent and have not acknowledged.
func inspect(t *testing.T, url, queue string) (found amqp091.Queue) {
	t.Helper()
	onChannel(t, url, func(channel *amqp091.Channel) (err error) {
		found, err = channel.QueueDeclarePassive(queue, true, false, false, false, nil)
		return err
	})
	return found
}

// left returns how many messages are in the queues, once they have no consumers any more: then what those had not
// acknowledged is back.
func left(t *testing.T, url string, queues ...string) (n int) {
	t.Helper()
	for _, queue := range queues {
		waitFor(t, ample, "the consumers of "+queue+" to be gone", func() bool { return inspect(t, url, queue).Consumers == 0 })
		n += inspect(t, url, queue).Messages
	}
	return n
}

// drain ends the consumers when they have emptied the queues. What a consumer had not acknowledged when it ended is back
// in its queue, so they run again until nothing is. It removes the queues, the last one of which, for poisoned messages,
// has to be empty.
func drain(t *testing.T, url string, queues []string, consumers ...*process) {
	t.Helper()
	worked, poison := queues[:len(queues)-1], queues[len(queues)-1]
	for empty := false; !empty; {
		for _, queue := range worked {
			waitFor(t, ample, queue+" to be empty", func() bool { return inspect(t, url, queue).Messages == 0 })
		}
		for _, consumer := range consumers {
			consumer.terminate()
		}
		if empty = left(t, url, worked...) == 0; !empty {
			for _, consumer := range consumers {
				consumer.start()
			}
		}
	}
	if n := left(t, url, poison); n > 0 {
		t.Errorf("%d messages were poisoned", n)
	}
	remove(t, url, queues...)
}

// remove removes queues.
func remove(t *testing.T, url string, queues ...string) {
	t.Helper()
	onChannel(t, url, func(channel *amqp091.Channel) error {
		for _, queue := range queues {
			if _, err := channel.QueueDelete(queue, false, false, false); err != nil {
				return err
			}
		}
		return nil
	})
}
